"""Servers that share the devices of a project, and the command that collects their samples."""

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from msgspec import UNSET
from tests.blob_source import BlobSource
from tests.edge.rig import rows_of

from cavvy.capabilities.edge import command as edge
from cavvy.capabilities.edge.devices import SitePace, change_row, merge_settings
from cavvy.capabilities.edge.nouns import DeviceReport, EdgeDevice, EdgeSettings, Rollout
from cavvy.capabilities.edge.service import EdgeService, EnrolmentRefused, ModelRefused, edge_key
from cavvy.capabilities.edge.wire import SamplesView, SampleView, SiteAsk, SiteView
from cavvy.capabilities.models.nouns import ModelFile, ModelVersion, find_labels
from cavvy.client.blobs import download_files, download_snapshot
from cavvy.client.errors import ApiError, ConnectionLost
from cavvy.control.parts import KnownService
from cavvy.domain.audit import AuditOutcome
from cavvy.domain.values import asdict, replace
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.base import KeyUnusable, RowNotFound
from cavvy.store.open import MemoryStore
from cavvy.task_files import ReadOptions, parse_task

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_reports_to_another_server_do_not_bring_a_retired_device_back() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        one, two = (EdgeService(store, clock, lambda *_: None) for _ in range(2))
        token, _ = await one.invite("p", site="lyon", labels={}, count=1, valid=timedelta(hours=1))
        device = await one.enrol("p", token, "0" * 64, "box", {})
        await two.check_in("p", device.name, DeviceReport(at=NOW))  # which keeps its row in memory
        await one.retire("p", device.name)
        for _ in range(3):
            try:
                await two.check_in("p", device.name, DeviceReport(at=NOW))
            except EnrolmentRefused:
                break
            await two.reconcile(edge_key("p"))
        stored = await rows_of(store).devices.get("p", device.name)
        assert stored.retired_at == NOW
        with pytest.raises(EnrolmentRefused):
            await two.check_in("p", device.name, DeviceReport(at=NOW))

    asyncio.run(play())


def test_what_changes_while_rows_are_read_is_not_lost() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        reading, read_on = asyncio.Event(), asyncio.Event()

        async def list_services(project: str) -> list[KnownService]:
            reading.set()
            await read_on.wait()
            return []

        edge = EdgeService(store, clock, lambda *_: None, list_services)
        names = []
        for number in range(2):
            token, _ = await edge.invite(
                "p", site="lyon", labels={}, count=1, valid=timedelta(hours=1)
            )
            device = await edge.enrol("p", token, f"{number:064x}", f"box{number}", {})
            names.append(device.name)
        version = ModelVersion(
            project="p", name="m@2", created_at=NOW, snapshot="", files=(), main=""
        )
        await rows_of(store).models.put(version)
        told = [
            asyncio.create_task(edge.check_in("p", each, DeviceReport(at=NOW))) for each in names
        ]
        await reading.wait()
        rollout = Rollout(
            project="p", name="", created_at=NOW, model="m", to=2, wave_at=NOW, waves=(1.0,)
        )
        await edge.deploy(rollout)
        token, _ = await edge.invite("p", site="lyon", labels={}, count=1, valid=timedelta(hours=1))
        await edge.enrol("p", token, "f" * 64, "late", {})
        read_on.set()
        await asyncio.gather(*told)
        await edge.reconcile(edge_key("p"))
        [wanted] = await edge.check_in("p", names[0], DeviceReport(at=NOW))
        assert wanted.version.name == "m@2"
        assert len(edge._known["p"].devices) == 3
        stored = [await rows_of(store).devices.get("p", each) for each in names]
        assert [each.report and each.report.at for each in stored] == [NOW, NOW]

    asyncio.run(play())


def test_a_change_of_one_project_lets_no_other_project_be_read_again() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        reading, read_on, reads = asyncio.Event(), asyncio.Event(), list[str]()

        async def list_services(project: str) -> list[KnownService]:
            reads.append(project)
            reading.set()
            await read_on.wait()
            return []

        edge = EdgeService(store, clock, lambda *_: None, list_services)

        async def enrol(project: str, key: str) -> str:
            hour = timedelta(hours=1)
            token, _ = await edge.invite(project, site="lyon", labels={}, count=1, valid=hour)
            return (await edge.enrol(project, token, key * 64, f"box{key}", {})).name

        device = await enrol("p", "0")
        await enrol("q", "1")
        told = asyncio.create_task(edge.check_in("p", device, DeviceReport(at=NOW)))
        await reading.wait()
        await enrol("q", "2")
        read_on.set()
        await told
        await edge.check_in("p", device, DeviceReport(at=NOW))
        assert reads == ["p"]

    asyncio.run(play())


def test_a_device_that_ends_its_requests_takes_no_time_from_its_site() -> None:
    async def play() -> None:
        async def sleep_until(when: datetime) -> None:
            if when > NOW:
                await asyncio.Event().wait()

        pace = SitePace(cast(Any, SimpleNamespace(now=lambda: NOW, sleep_until=sleep_until)))
        site, mib = ("p", "lyon"), 1 << 20
        await pace.wait(pace.turn_of("p", "honest"), site, mib, 1.0)
        for _ in range(1000):
            asked = asyncio.create_task(pace.wait(pace.turn_of("p", "bad"), site, mib, 1.0))
            await asyncio.sleep(0)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
        assert pace.reserve(site, mib, 1.0) == NOW + timedelta(seconds=1)

    asyncio.run(play())


def make_service(name: str, rule: str, more: str = "") -> KnownService:
    text = f"""
name: {name}
run: x
resources: {{cpu: 1}}
service: {{edge: {rule}{more}}}
"""
    task = replace(parse_task(text, options=ReadOptions(serves=True)), project="p")
    return KnownService(id=name, task=task, url=f"http://cloud/{name}")


def test_a_device_sends_its_requests_only_where_they_may_go() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        opened = {"LINE_KEY": "s3cret"}

        async def open_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
            if "BROKEN" in names:
                raise KeyUnusable("the secret BROKEN cannot be decrypted")
            return {each: opened[each] for each in names if each in opened}

        services: list[KnownService] = []

        async def list_services(project: str) -> list[KnownService]:
            return services

        edge = EdgeService(store, clock, lambda *_: None, list_services, open_secrets)
        names = []
        for number, (site, residency) in enumerate([("lyon", ""), ("lyon", "eu"), ("oslo", "")]):
            labels = {"residency": residency} if residency else {}
            token, _ = await edge.invite(
                "p", site=site, labels=labels, count=1, valid=timedelta(hours=1)
            )
            device = await edge.enrol("p", token, f"{number:064x}", f"box{number}", {})
            names.append(device.name)

        async def find() -> list[list[tuple[str, str]]]:
            edge._known.clear()
            return [
                [(each.service.url[13:], each.key) for each in await edge.find_clouds("p", name)]
                for name in names
            ]

        assert await find() == [[], [], []]
        services += [
            make_service("all", "{model: m}"),
            make_service("line", "{model: m, site: lyon, key: LINE_KEY}"),
            make_service("other", "{model: n, site: oslo, key: GONE}"),
        ]
        found = await find()
        assert found[:2] == [[("line", "s3cret")], []]
        assert sorted(found[2]) == [("all", ""), ("other", "")]
        refused = await store.audit_records(outcome=AuditOutcome.REFUSED)
        assert len(refused) == 2, "one for each service, however often the device asks"
        services.append(make_service("eu", "{model: o, site: lyon}", ", residency: eu"))
        assert [("eu", "") in found for found in await find()] == [True, True, False]
        services.append(make_service("broken", "{model: p, site: oslo, key: BROKEN}"))
        assert ("broken", "") in (await find())[2], "its devices still check in"
        retired = [await edge.retire("p", name) for name in names]
        assert retired == [{"LINE_KEY": ["line"]}, {}, {"BROKEN": ["broken"], "GONE": ["other"]}]
        assert await edge.retire("p", names[0]) == retired[0], "it can be asked again"
        for name in names:  # for what follows
            row = await rows_of(store).devices.get("p", name)
            await rows_of(store).devices.put(replace(row, retired_at=None))
        ((rule, devices),) = await edge.list_clouds(make_service("x", "{model: m, site: lyon}"))
        assert (rule.site, devices.devices, devices.kept, devices.paths) == ("lyon", 2, 1, [])

    asyncio.run(play())


def test_collected_samples_replace_no_device_and_no_missing_folder_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = SamplesView(samples=[SampleView(device="d", number=1, body="{}")], left_out=0, after="")
    monkeypatch.setattr(edge, "session", lambda: nullcontext(None))
    monkeypatch.setattr("cavvy.capabilities.edge.wire.list_samples", lambda *_, **__: page)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, tmp_path / "no" / "file", tmp_path):
        found = CliRunner().invoke(edge.command, ["collect", "m", "--out", str(out)])
        assert found.exit_code == 2, found
    assert pipe.is_fifo()
    good = tmp_path / "hard.jsonl"
    assert CliRunner().invoke(edge.command, ["collect", "m", "--out", str(good)]).exit_code == 0
    assert good.read_text() == '{"device": "d"}\n'
    assert sorted(os.listdir(tmp_path)) == ["hard.jsonl", "pipe"]


def test_a_price_leaves_the_limits_of_a_site_and_limits_leave_its_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[str, SiteView] = {}

    def limit(client: object, project: str, name: str, ask: SiteAsk) -> SiteView:
        fields = asdict(ask)
        if fields["device_micros_per_hour"] is UNSET:  # the server keeps the price
            before = known.get(name)
            fields["device_micros_per_hour"] = before and before.device_micros_per_hour
        known[name] = SiteView(project=project, name=name, **fields)
        return known[name]

    monkeypatch.setattr(edge, "session", lambda: nullcontext(None))
    monkeypatch.setattr("cavvy.capabilities.edge.wire.list_sites", lambda *_: list(known.values()))
    monkeypatch.setattr("cavvy.capabilities.edge.wire.limit_site", limit)

    def run(*options: str) -> str:
        found = CliRunner().invoke(edge.command, ["site", "lyon", *options])
        assert found.exit_code == 0, found
        return found.output

    assert "price of a device unknown" in run()
    assert "$0.012 per hour and device" in run("--device-usd-hour", "0.012", "--mib-per-s", "2")
    assert "2 MiB/s for all its devices, updates at all hours, $20 " in run(
        "--device-usd-hour", "20"
    )
    assert "no limit for all its devices, updates at 1-5 h, $20 " in run("--window", "1-5")
    assert "updates at all hours, $20 " in run("--no-limits")
    assert "price of a device unknown" in run("--device-usd-hour", "none")
    for wrong in ("-1", "x", "1e30", "nan", "0,5"):
        found = CliRunner().invoke(edge.command, ["site", "lyon", "--device-usd-hour", wrong])
        assert found.exit_code == 2, wrong
        assert "--device-usd-hour: " in found.output


def test_what_is_set_for_a_device_precedes_its_label_and_that_its_site() -> None:
    device = EdgeDevice(
        project="p",
        name="d",
        site="lyon",
        labels={"kind": "jetson", "arch": "arm"},
        key="",
        enrolled_at=NOW,
    )
    places = ("site/lyon", "label/arch=arm", "label/kind=jetson", "device/d", "site/oslo")
    rows = {
        place: EdgeSettings(
            project="p",
            name=place,
            options={"every_s": float(number)},
            variables={f"V{number}": "x", "WHO": place},
        )
        for number, place in enumerate(places, 10)
    }
    found = merge_settings(device, rows, {})
    assert (found.of("option"), found.of("variable")["WHO"]) == ({"every_s": 13.0}, "device/d")
    assert found.of("variable").keys() == {"V10", "V11", "V12", "V13", "WHO"}
    for place in ("device/d", "label/kind=jetson", "label/arch=arm"):
        del rows[place]
        assert merge_settings(device, rows, {}).revision != found.revision
        found = merge_settings(device, rows, {})
    assert (found.of("option"), {each.source for each in found.given}) == (
        {"every_s": 10.0},
        {"site/lyon"},
    )
    # a variable is a secret or not, whichever was set last
    row = change_row(rows["site/lyon"], {}, {}, ["WHO"], ["every_s"])
    assert (row.options, row.variables, row.secrets) == ({}, {"V10": "x"}, ("WHO",))
    kept = [merge_settings(device, {row.name: row}, known) for known in ({"WHO": NOW}, {})]
    later = merge_settings(device, {row.name: row}, {"WHO": NOW + timedelta(seconds=1)})
    assert (kept[0].secrets, kept[1].secrets) == (["WHO"], [])
    assert len({each.revision for each in (*kept, later)}) == 3, "rotated and deleted"
    assert change_row(row, {}, {"WHO": "me"}, [], []).secrets == ()


def test_a_cut_download_goes_on_where_it_ended(tmp_path: Path) -> None:
    name = sha256(b"0123456789").hexdigest()
    files = [("deep/m.onnx", name, 10)]
    path, part = tmp_path / "deep" / "m.onnx", tmp_path / "deep" / f".{name[:16]}.part"
    blobs = {name: b"0123456789"}
    source = BlobSource(blobs, breaks=3)
    with pytest.raises(ConnectionLost):
        download_files(cast(Any, source), "p", files, tmp_path)
    assert part.read_bytes() == b"012345"
    assert not path.exists()
    assert download_files(cast(Any, source), "p", files, tmp_path) == 1
    assert source.sent == 10, "no byte is sent twice"
    assert download_files(cast(Any, source), "p", files, tmp_path) == 0
    assert (path.read_bytes(), source.sent, part.exists()) == (b"0123456789", 10, False)
    # what is damaged, or another file's, is replaced
    for left, ranges in ((b"01x", True), (b"0123456789longer", True), (b"012", False)):
        path.write_bytes(b"old")
        part.write_bytes(left)
        assert download_files(cast(Any, BlobSource(blobs, 100, ranges)), "p", files, tmp_path) == 1
        assert path.read_bytes() == b"0123456789"
    # a link in the folder does not lead the download out of it
    (tmp_path / "out").mkdir()
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "deep").symlink_to(tmp_path / "out")
    with pytest.raises(ApiError, match=r"deep.m\.onnx: Not a directory"):
        download_files(cast(Any, source), "p", files, folder)
    path.write_bytes(b"old")
    part.symlink_to(tmp_path / "target")
    with pytest.raises(ApiError, match="symbolic"):
        download_files(cast(Any, source), "p", files, tmp_path)


class PlainSealer:
    """Seals nothing, but binds a text to its project and name."""

    def seal(self, project: str, name: str, text: str) -> bytes:
        return f"{project} {name} {text}".encode()

    def unseal(self, project: str, name: str, sealed: bytes) -> str:
        return sealed.decode().removeprefix(f"{project} {name} ")


def test_new_keys_replace_the_stored_ones_also_beside_a_publication() -> None:
    pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        one, two = (EdgeService(store, clock, lambda *_: None) for _ in range(2))
        sealer = cast(Any, PlainSealer())
        with pytest.raises(RowNotFound, match="published no model"):
            await one.registry.read_lists("p", "m")
        await one.registry.rotate_keys("p", sealer)  # makes the first ones
        files = (ModelFile(path="m.onnx", sha256="0" * 64, size=1),)
        model = ModelVersion(
            project="p", name="m@0", snapshot="", files=files, main="m.onnx", created_at=NOW
        )
        blobs = cast(Any, None)  # there are no deltas
        await one.registry.publish(model, sealer, blobs)
        before = await one.registry.repository("p", sealer)
        await asyncio.gather(
            one.registry.rotate_keys("p", sealer),
            two.registry.publish(model, sealer, blobs),
            two.registry.rotate_keys("p", sealer),
            one.registry.publish(model, sealer, blobs),
        )
        after = await two.registry.repository("p", sealer)
        assert sorted(name for name in after.files if "root" in name) == [
            "1.root.json",
            "2.root.json",
            "3.root.json",
        ]
        newest = max((name for name in after.files if "model-m" in name), key=version_of)
        targets = json.loads(after.files[newest])["signed"]["targets"]
        assert sorted(targets) == ["m/1.json", "m/2.json", "m/3.json"]
        assert not set(before.keys.values()) & set(after.keys.values())

    asyncio.run(play())


def version_of(name: str) -> int:
    return int(name.partition(".")[0])


def test_a_label_is_on_one_version_whoever_moves_it() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        one, two = (EdgeService(store, clock, lambda *_: None) for _ in range(2))
        for number in (1, 2, 3):
            for name in ("m", "n"):
                await rows_of(store).models.put(
                    ModelVersion(
                        project="p",
                        name=f"{name}@{number}",
                        snapshot="",
                        files=(),
                        main="",
                        created_at=NOW,
                    )
                )

        async def holder() -> str:
            return (await one.registry.find_labelled("p", "m", "production")).name

        with pytest.raises(RowNotFound):
            await holder()
        assert (await one.registry.promote("p", "m", "production", 3))[1] is None
        await one.registry.promote("p", "m", "next", 3)
        for number in (1, 2, 1, 3, 3, 1):  # back and forth, also to one that had it before
            moved, former = await two.registry.promote("p", "m", "production", number)
            assert moved.name == await holder() == f"m@{number}"
            assert former is not None
        assert (await one.registry.find_labelled("p", "m", "next")).name == "m@3"
        with pytest.raises(RowNotFound):
            await one.registry.promote("p", "m", "production", 4)
        with pytest.raises(RowNotFound):
            await one.registry.find_labelled("p", "n", "production")
        for wrong in (
            "7",
            "",
            "Prod",
            "a/b",
            "-",
            "x" * 64,
            "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
        ):
            with pytest.raises(ModelRefused):
                await one.registry.promote("p", "m", wrong, 1)
        for each in range(14):
            await one.registry.promote("p", "m", f"l{each}", 1)
        with pytest.raises(ModelRefused, match="16 labels"):
            await one.registry.promote("p", "m", "more", 1)
        await asyncio.gather(
            *(each.registry.promote("p", "m", "next", n) for n, each in ((1, one), (2, two)))
        )
        assert len(find_labels(await one.registry.models("p"))) == 16
        # one of two removals finds the label; also a version that had it before has it no longer
        ended = await asyncio.gather(
            *(each.registry.unlabel("p", "m", "production") for each in (one, two)),
            return_exceptions=True,
        )
        assert {type(each) for each in ended} == {ModelVersion, RowNotFound}
        for each in (
            holder(),
            one.registry.unlabel("p", "n", "next"),
            one.registry.unlabel("p", "x", "next"),
        ):
            with pytest.raises(RowNotFound):
                await each
        assert len(find_labels(await two.registry.models("p"))) == 15
        assert (await one.registry.promote("p", "m", "more", 2))[1] is None
        # a version promoted during the removal keeps the label, or loses it; no other has it
        for _ in range(5):
            await one.registry.promote("p", "m", "more", 2)
            await asyncio.gather(
                one.registry.unlabel("p", "m", "more"), two.registry.promote("p", "m", "more", 3)
            )
            left = find_labels(await one.registry.models("p")).get(("p", "m", "more"))
            assert left is None or left.name == "m@3"

    asyncio.run(play())


@pytest.mark.parametrize("wrong", ["", "bytes", "path"])
def test_a_downloaded_snapshot_has_its_bytes_and_stays_in_its_folder(
    tmp_path: Path, wrong: str
) -> None:
    name = sha256(b"weights").hexdigest()
    path = "model/../../out" if wrong == "path" else "model/deep/m.onnx"
    entries = [FolderEntry(path=each, size=7, sha256=name) for each in (path, "other/m.onnx")]
    manifest = encode_manifest(entries)
    blobs = {name: b"spoilt!" if wrong == "bytes" else b"weights"}
    blobs[snapshot := sha256(manifest).hexdigest()] = manifest
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ApiError) if wrong else nullcontext():
        download_snapshot(cast(Any, BlobSource(blobs)), "p", snapshot, "model", folder)
    written = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert written == ([] if wrong else [folder / "deep" / "m.onnx"])


def test_check_ins_are_written_in_groups_and_a_rollout_begins_at_once() -> None:
    async def play() -> None:
        hints: list[timedelta] = []
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        edge = EdgeService(store, clock, lambda key, after: hints.append(after))
        token, _ = await edge.invite("p", site="s", labels={}, count=9, valid=timedelta(hours=1))
        for number in range(9):
            device = await edge.enrol("p", token, f"{number:064x}", f"box{number}", {})
            await edge.check_in("p", device.name, DeviceReport(at=NOW))
        assert len(hints) == 1
        assert hints[0] >= timedelta(seconds=5)
        model = ModelVersion(
            project="p", name="m@1", snapshot="", files=(), main="m", created_at=NOW
        )
        await rows_of(store).models.put(model)
        own = {"project": "p", "created_at": NOW, "wave_at": NOW}
        await edge.deploy(Rollout(**own, name="m-0", model="m", to=1))
        assert hints[1:] == [timedelta(0)]

    asyncio.run(play())
