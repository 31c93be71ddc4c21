"""Makes curves of the stored values, with as many points as are asked for."""

from collections.abc import Collection, Sequence

from cavvy.capabilities.curves.packing import join, unpack
from cavvy.capabilities.curves.wire import Curve


def make_curves(
    pieces: Sequence[bytes], attempt: int, rank: int, names: Collection[str], most: int
) -> Sequence[Curve]:
    """Return the curve of each name, or of these names, in the order of the names."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for columns in join(map(unpack, pieces)):
        for name, values in zip(columns.names, columns.values, strict=True):
            if not names or name in names:
                rows = zip(columns.times, columns.steps, values, strict=True)
                found.setdefault(name, []).extend(row for row in rows if row[2] == row[2])
    curves = []
    for name in sorted(found):
        # by time; the order of the reports stays where times are equal
        points = sorted(found[name], key=lambda point: point[0])
        if not points:
            continue
        numbered = [number if step != step else step for number, (_, step, _) in enumerate(points)]
        values = [value for _, _, value in points]
        kept = thin(values, most)
        curves.append(
            Curve(
                name=name,
                attempt=attempt,
                rank=rank,
                count=len(points),
                steps=[float(numbered[each]) for each in kept],
                times_ms=[int(points[each][0]) for each in kept],
                values=[values[each] for each in kept],
                low=min(values),
                high=max(values),
                last=values[-1],
            )
        )
    return curves


def thin(values: Sequence[float], most: int) -> Sequence[int]:
    """Return the positions of at most about `most` values: the first, the last, and the lowest
    and highest of each of equal stretches, so that no peak is lost.
    """
    count = len(values)
    if count <= most:
        return range(count)
    stretches = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for number in range(stretches):
        begin, end = number * count // stretches, (number + 1) * count // stretches
        kept.add(min(range(begin, end), key=values.__getitem__))
        kept.add(max(range(begin, end), key=values.__getitem__))
    return sorted(kept)
