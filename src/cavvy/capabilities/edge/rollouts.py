"""Decides which devices get which version of a model, and whether a rollout goes on, ends or halts.

The devices of a rollout have a fixed order, by the SHA-256 of the rollout's and the device's names,
so that neither the first device nor the first per cent are the same ones each time. A wave after
the first grows: it gets as many devices again as have the version each time that these serve it,
and all of its devices after the time `soak_s`. A bad version is thus found by few of them. A wave
ends when its devices serve the new version, `soak_s` has passed since it began, and they have had
requests or it has lasted the double of that time. In each wave, the sequential test of canaries
(`canary.py`) compares the errors and latencies of the requests to the new version with those of the
other devices.

Devices are not trusted, so one of them must not end a rollout alone. If the test finds the new
version worse, but not without the counts of one device, these are left out from then on, and the
test begins again. A device that alone has answered requests, or is alone in its wave, decides.

A device that cannot fetch the version, because its disk is too small or its clock is wrong, does
not hold a wave up: it is named in the rollout's reason, and moves to the end of the order. It tries
again and gets the version once it can. If no device that is there can fetch it, the rollout halts.
"""

from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from math import ceil, log, sqrt

from cavvy.capabilities.edge.nouns import (
    CHECK_IN_S,
    EdgeDevice,
    ModelReport,
    Rollout,
    RolloutPhase,
)
from cavvy.capabilities.models.nouns import ModelVersion
from cavvy.control.decide.canary import SLOWER, CanaryJudgement, CanaryTerms, judge, observe
from cavvy.domain.service_updates import PROMOTED, CanaryTrial, RevisionSums
from cavvy.domain.values import replace

# A rollout halts if at least two devices and more than this share of those that tried the new
# version refused it (their trial failed), and if the only device of the wave that is there did.
MOST_REFUSED = 0.1
# What one device adds to the trial between two reports has at most this number of requests, and
# logarithms of latencies from -30 to 30. Other sums are left out, because devices are not trusted:
# the test would take minutes, or numbers would overflow.
_MOST_REQUESTS, _MOST_LOG = 1_000_000, 30.0
# What one device adds is scaled down to this multiple of the median of the others, or of this
# number of requests if that is more: a device alone must not outweigh all others. One that checks
# in more often than each `_USUAL_S` adds as much less each time.
_MOST_SHARE, _LEAST_MEDIAN = 10, 100
_USUAL_S = 0.75 * CHECK_IN_S  # a little less than the shortest interval with its jitter
_GROWTH = 2  # a wave grows by this factor
_PATIENCE = 2.0  # a quiet wave ends after this multiple of `soak_s`
# A device that has not checked in for this time does not hold a wave up.
SILENT = timedelta(minutes=10)
# A wave whose devices have all been silent for this time, while others of the rollout are not,
# ends: the next wave tries the version on others. But the version may have cut them off, so the
# rollout halts if more than one of them was heard of since the rollout began, or if the only one
# has ended a wave in this way before.
_GIVEN_UP = timedelta(hours=1)
_NAMED = 3  # devices that could not fetch a version, by name in its reason
_MOST_WHY = 200  # characters of what one of them says
_MOST_SKEW_S = 300.0  # a clock that is as wrong as this may refuse signed lists
_AGREES = 2.0  # standard deviations by which the errors of the other devices exceed the usual ones
_WITNESS = 5  # requests to the new version from which the counts of a device say something


def order_devices(rollout: Rollout, devices: Sequence[EdgeDevice]) -> Sequence[EdgeDevice]:
    """Return the devices of a rollout in the order in which they get the new version: those that
    have never checked in are last, because a wave of them alone would never end. Before them are
    those that could not fetch the version: others try it first."""

    def rank(device: EdgeDevice) -> tuple[int, bytes]:
        place = 2 if device.report is None else int(device.name in rollout.unable)
        return place, _hash(f"{rollout.name}\0{device.name}")

    return sorted((each for each in devices if rollout.covers(each)), key=rank)


def count_wave(rollout: Rollout, devices: int) -> int:
    """Return how many of its devices may have the new version now."""
    if rollout.phase is RolloutPhase.DONE:
        return devices
    whole = _count_whole(rollout, devices)
    return min(whole, rollout.grown) if rollout.grown else whole


def _count_whole(rollout: Rollout, devices: int) -> int:
    share = rollout.waves[min(rollout.wave, len(rollout.waves) - 1)]
    return min(devices, max(1, ceil(share * devices)))


def choose_versions(
    device: EdgeDevice, rollouts: Sequence[Rollout], members: Mapping[str, frozenset[str]]
) -> Mapping[str, Rollout]:
    """Return, by model, the rollout whose version the device is to serve. `members` contains, by
    rollout, the names of the devices in its present wave. A rollout that was halted or replaced
    counts for no device, so its devices return to the version of the rollout before it.
    """
    found: dict[str, Rollout] = {}
    for each in sorted(rollouts, key=lambda rollout: rollout.number):
        if each.phase in (RolloutPhase.HALTED, RolloutPhase.REPLACED) or not each.covers(device):
            continue
        if each.phase is RolloutPhase.RUNNING and device.name not in members.get(
            each.name, frozenset()
        ):
            continue
        found[each.model] = each
    return found


def decide_rollout(
    rollout: Rollout,
    devices: Sequence[EdgeDevice],
    now: datetime,
    taken: Container[str] = frozenset(),
) -> Rollout:
    """Return the rollout after a look at what its devices have reported, except for the devices
    `taken` by newer rollouts."""
    if rollout.phase is not RolloutPhase.RUNNING:
        return rollout
    rollout = _note_unable(rollout, devices, taken)
    ordered = order_devices(rollout, devices)
    size = count_wave(rollout, len(ordered))
    wave = [each for each in ordered[:size] if each.name not in taken]
    mine = [each for each in ordered if each.name not in taken]
    if ordered and not mine:
        reason = "newer rollouts have all of its devices"
        return replace(rollout, phase=RolloutPhase.REPLACED, reason=reason, counted={})
    rollout = _count(rollout, [each for each in mine if each.name not in rollout.doubted])
    heard = [each for each in mine if _is_heard(each, now)]
    in_wave = [_find(each, rollout.model) for each in wave]
    refused = [each for each in in_wave if each is not None and rollout.is_refused(each)]
    tried = [
        each
        for each in in_wave
        if each and (each.serving == rollout.to or rollout.is_refused(each))
    ]
    able = [each for each in wave if not _is_unfetched(rollout, each)]
    alone = len(tried) == 1 and sum(each in heard for each in able) <= 1
    if refused and (alone or len(refused) > max(1, MOST_REFUSED * len(tried))):
        why = refused[0].problem or "its trial on the device failed"
        reason = f"{len(refused)} of {len(tried)} devices refused it: {why}"
        return replace(rollout, phase=RolloutPhase.HALTED, reason=reason)
    terms = CanaryTerms(alpha=rollout.alpha)
    judged = judge(rollout.trial, terms)
    if judged.end is not None and judged.end not in PROMOTED:
        if doubted := _find_doubted(rollout, wave, judged):
            return replace(
                rollout,
                doubted=(*rollout.doubted, doubted),
                trial=CanaryTrial(),
                sums_old=RevisionSums(),
                sums_new=RevisionSums(),
            )
        return replace(rollout, phase=RolloutPhase.HALTED, reason=_tell_worse(judged))
    if _is_never_fetched(rollout, heard, now):
        return replace(rollout, phase=RolloutPhase.HALTED)
    given_up = _is_given_up(rollout, wave, heard, now)
    if given_up and _are_cut_off(rollout, wave):
        told = f"all {len(wave)} devices" if len(wave) > 1 else "the only device"
        reason = f"{told} of the wave fell silent"
        return replace(rollout, phase=RolloutPhase.HALTED, reason=reason)
    if ordered and size < _count_whole(rollout, len(ordered)) and not given_up:
        return _grow(rollout, wave, size, now)
    if not ordered or not (given_up or _is_wave_over(rollout, wave, now)):
        return rollout
    if size == len(ordered):
        return replace(rollout, phase=RolloutPhase.DONE, wave_at=now, counted={})
    return replace(rollout, wave=rollout.wave + 1, wave_at=now, grown=_GROWTH * size)


def _tell_worse(judged: CanaryJudgement) -> str:
    old, new = judged.errors
    if judged.end == "errors":
        return f"more of its requests fail ({new:.1%} instead of {old:.1%})"
    return f"its requests take {judged.slower:.2f} times as long"


def _grow(rollout: Rollout, wave: Sequence[EdgeDevice], size: int, now: datetime) -> Rollout:
    if now - rollout.wave_at >= timedelta(seconds=rollout.soak_s):
        return replace(rollout, grown=0)
    return replace(rollout, grown=_GROWTH * size) if _are_settled(rollout, wave, now) else rollout


def _find_doubted(rollout: Rollout, wave: Sequence[EdgeDevice], judged: CanaryJudgement) -> str:
    """Return the device without whose counts the new version does not seem worse, or ""."""
    found = {
        each.name: told.sums
        for each in wave
        if each.name not in rollout.doubted
        and (told := _find(each, rollout.model))
        and told.serving == rollout.to
        and told.sums.requests >= _WITNESS
        and _is_possible(told.sums)
    }
    if len(found) < 2:
        return ""
    found = dict(zip(found, _limit(list(found.values())), strict=True))
    old = rollout.trial.old
    if judged.end == "errors":
        usual = old.errors / max(1, old.requests)
        worst = max(found, key=lambda name: found[name].errors - usual * found[name].requests)
        rest = [sums for name, sums in found.items() if name != worst]
        requests, errors = sum(each.requests for each in rest), sum(each.errors for each in rest)
        share = (errors + old.errors) / max(1, requests + old.requests)
        deviation = sqrt(share * requests * (1 + requests / max(1, old.requests)))
        return "" if errors > usual * requests + _AGREES * deviation else worst
    usual = old.logs / max(1, old.timed)
    worst = max(found, key=lambda name: found[name].logs - usual * found[name].timed)
    rest = [sums for name, sums in found.items() if name != worst]
    timed, logs = sum(each.timed for each in rest), sum(each.logs for each in rest)
    return "" if timed and logs / timed > usual + log(SLOWER + 1) / 2 else worst


def _is_given_up(
    rollout: Rollout, wave: Sequence[EdgeDevice], heard: Sequence[EdgeDevice], now: datetime
) -> bool:
    """Return whether all devices of the wave have fallen silent, and others have not."""
    told = [each.report.at for each in wave if each.report is not None]
    if not told or not heard or any(each in heard for each in wave):
        return False
    soak = timedelta(seconds=rollout.soak_s)
    return now - max(rollout.wave_at, *told) >= max(_GIVEN_UP, _PATIENCE * soak)


def _are_cut_off(rollout: Rollout, wave: Sequence[EdgeDevice]) -> bool:
    told = [each.report.at for each in wave if each.report is not None]
    fell = [each for each in told if each >= rollout.created_at]
    # a wave that ended otherwise had a device that was heard of
    is_second = rollout.wave > 0 and max(told) < rollout.wave_at - SILENT
    return len(fell) > (0 if is_second else 1)


def list_doubtful(devices: Sequence[EdgeDevice], model: ModelVersion) -> Sequence[str]:
    """Return the devices that seem unable to fetch a version: they could not fetch another one,
    their disk is too small, or their clock is wrong."""
    return [
        each.name
        for each in devices
        if each.report is not None
        and (
            any(told.unfetched for told in each.report.models)
            or (each.report.free_mib << 20) < model.size
            or abs(each.report.skew_s) > _MOST_SKEW_S
        )
    ]


def _note_unable(rollout: Rollout, devices: Sequence[EdgeDevice], taken: Container[str]) -> Rollout:
    """Return the rollout with the devices that could not fetch the version, named in its reason."""
    mine = [each for each in devices if rollout.covers(each) and each.name not in taken]
    unable = dict(rollout.unable)
    without: dict[str, str] = {}
    for each in sorted(mine, key=lambda device: device.name):
        told = _find(each, rollout.model)
        if told is not None and rollout.is_unfetched(told):
            unable[each.name] = told.problem[:_MOST_WHY] or "it does not say why"
        if unable.get(each.name) and not (told and told.serving == rollout.to):
            without[each.name] = unable[each.name]
    reason = ""
    if without:
        named = ", ".join([*without][:_NAMED]) + ", …" * (len(without) > _NAMED)
        why = next(iter(without.values()))
        reason = f"{len(without)} of {len(mine)} devices could not fetch it ({named}): {why}"
    return replace(rollout, unable=unable, reason=reason)


def _is_unfetched(rollout: Rollout, device: EdgeDevice) -> bool:
    told = _find(device, rollout.model)
    return told is not None and rollout.is_unfetched(told)


def _is_never_fetched(rollout: Rollout, heard: Sequence[EdgeDevice], now: datetime) -> bool:
    """Return whether no device that is there could fetch the version for a long time."""
    told = [(each, _find(each, rollout.model)) for each in heard]
    waited = now - rollout.wave_at >= max(_GIVEN_UP, timedelta(seconds=_PATIENCE * rollout.soak_s))
    return (
        waited
        and bool(told)
        and all(
            rollout.unable.get(each.name)
            and not (found and (found.serving == rollout.to or rollout.is_refused(found)))
            for each, found in told
        )
    )


def _is_heard(device: EdgeDevice, now: datetime) -> bool:
    return device.report is not None and now - device.report.at < SILENT


def _is_wave_over(rollout: Rollout, devices: Sequence[EdgeDevice], now: datetime) -> bool:
    soaked = now - rollout.wave_at >= timedelta(seconds=rollout.soak_s)
    if not devices or not soaked:
        return soaked
    if not _are_settled(rollout, devices, now):
        return False
    patient = now - rollout.wave_at >= timedelta(seconds=_PATIENCE * rollout.soak_s)
    return patient or rollout.trial.new.requests > 0


def _are_settled(rollout: Rollout, devices: Sequence[EdgeDevice], now: datetime) -> bool:
    """Return whether all devices that are there and can fetch the version serve or refuse it, and
    one serves it."""
    heard = [each for each in devices if _is_heard(each, now) and not _is_unfetched(rollout, each)]
    settled = [
        found
        for each in heard
        if (found := _find(each, rollout.model))
        and (found.serving == rollout.to or rollout.is_refused(found))
        and not found.on_trial
    ]
    return len(settled) == len(heard) and any(each.serving == rollout.to for each in settled)


def _count(rollout: Rollout, devices: Sequence[EdgeDevice]) -> Rollout:
    """Add what the devices have served since the last look to the trial. A device whose counts
    shrink, because its program was restarted or serves another version, counts from 0."""
    counted = dict(rollout.counted)
    added: list[tuple[int, RevisionSums]] = []
    parts: list[float] = []
    for device in devices:
        found = _find(device, rollout.model)
        if found is None or not found.serving or device.report is None:
            continue
        found, before = replace(found, paths=None), counted.get(device.name)
        passed = _USUAL_S
        if before is not None:
            if replace(before, at=None) == found:
                continue  # it has not checked in since the last look
            if before.at is not None:
                passed = max(0.0, (device.report.at - before.at).total_seconds())
        same = (
            before is not None
            and before.serving == found.serving
            and before.sums.requests <= found.sums.requests
            and before.sums.timed <= found.sums.timed
        )
        more = found.sums - before.sums if before is not None and same else found.sums
        counted[device.name] = replace(found, at=device.report.at)
        if before is None and found.serving != rollout.to:
            continue  # what it served before the rollout began
        if _is_possible(more):
            added.append((found.serving, more))
            parts.append(min(1.0, passed / _USUAL_S))
    old, new = rollout.sums_old, rollout.sums_new
    for (serving, _), more in zip(added, _limit([sums for _, sums in added], parts), strict=True):
        if serving == rollout.to:
            new += more
        else:
            old += more
    trial = observe(rollout.trial, old, new, CanaryTerms(alpha=rollout.alpha))
    return replace(rollout, counted=counted, sums_old=old, sums_new=new, trial=trial)


def _limit(sums: Sequence[RevisionSums], parts: Sequence[float] = ()) -> list[RevisionSums]:
    """Return the sums of devices, with those scaled down that have far more requests than the
    median of the others. `parts` are the shares of an interval in which they came."""
    ordered = sorted(each.requests for each in sums)
    found = []
    for each, part in zip(sums, parts or [1.0] * len(sums), strict=True):
        others = len(ordered) - 1
        at = others // 2  # among the others, which are one fewer from this device's place on
        at += bisect_left(ordered, each.requests) <= at
        median = ordered[at] if others else 0
        most = int(_MOST_SHARE * max(_LEAST_MEDIAN, median) * part)
        found.append(each if each.requests <= most else _scale(each, most))
    return found


def _scale(sums: RevisionSums, requests: int) -> RevisionSums:
    share = requests / sums.requests
    timed = int(sums.timed * share)
    of_timed = timed / max(1, sums.timed)
    return RevisionSums(
        requests=requests,
        errors=round(sums.errors * share),
        timed=timed,
        logs=sums.logs * of_timed,
        squares=sums.squares * of_timed,
    )


def _is_possible(sums: RevisionSums) -> bool:
    timed, most = sums.timed, _MOST_LOG
    return (
        0 <= min(sums.errors, timed) <= max(sums.errors, timed) <= sums.requests <= _MOST_REQUESTS
        and abs(sums.logs) <= most * timed
        and 0 <= sums.squares <= most**2 * timed
    )


def _find(device: EdgeDevice, model: str) -> ModelReport | None:
    return None if device.report is None else device.report.of(model)


def _hash(text: str) -> bytes:
    return sha256(text.encode()).digest()
