"""What programs draw and write for the pages about costs is fresh."""

from scripts.docs import pictures

from cavvy.capabilities.choose.diagram import list_pictures


def test_pictures_and_values_of_costs_are_fresh() -> None:
    assert pictures.PAGE.read_text("utf-8") == pictures.make_page(pictures.PAGE.read_text("utf-8"))
    for name, draw in list_pictures().items():
        for folder in (pictures.FOLDER, pictures.CONSOLE):
            path = folder / f"choose-{name}.svg"
            assert path.read_text("utf-8") == draw(), "run: python scripts/docs/pictures.py"
