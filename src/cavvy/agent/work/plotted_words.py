"""The names of values that people plot.

Each agent loads this module, but what reads the lines of a program only once a line may have one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST = 1e300


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What people plot: a name counts if one of its words is here, or ends with one of ENDS.
PLOTTED = _words(
    """
    acc accuracy advantage auc auprc auroc bce bleu bpb bpc cer cider correlation cosine cost dice
    elbo
    entropy eps epsilon err error fid fps f1 gnorm grad_norm hinge hits iou kl learn learning_rate
    likelihood logloss logp loss losses lr mae map mape mcc mfu miou mlogloss mrr mse msle ndcg
    nll overflow perplexity ppl precision psnr r2 rank_ic recall regret return returns reward
    rewards rew rmse rmsle rouge score scores sharpe smape speed ssim tflops throughput top1 top5
    tps ups wer win_rate winrate wps
    """
)
# These also stand in lines about other things, and settings are printed as if they were values:
# such a name counts beside another one, or in a line with a step.
WEAK = _words(
    """
    cost eps epsilon err error fps hits learn learning_rate lr map overflow precision return returns
    score scores speed
    """
)
ENDS = ("loss", "acc", "accuracy", "error", "reward", "score", "norm")
# One of these is part of each line that counts. They are looked for in lower case.
_PARTS = _words(
    """
    epoch episode iteration cost loss acc err rew return score ppl perplex lr learn norm auc f1
    mse mae map iou dice psnr ssim fid bleu rouge wer cer nll elbo entropy kl tps tflops mfu fps
    precision recall ndcg mrr mcc rmse bpc bpb wps ups r2 top1 top5 win sharpe regret bce speed
    throughput correl cosine likelihood advantage hit eps overflow mape smape cider
    """
)
# those that most lines have come first
_ENCODED = tuple(
    part.encode() for part in sorted(_PARTS, key=lambda each: (each not in ("loss", "epoch"), each))
)


# A program may report its values itself, in lines that begin with this, as JSON.
MARK = "CAVVY_PROGRESS {"
# Where a report has its step, and what it says of the progress rather than of results.
REPORTED_STEPS = ("step", "global_step", "iteration", "done")
NO_RESULTS = frozenset(("total", "complete", "fraction", "left_s", *REPORTED_STEPS))
_LOW_MARK = MARK.lower().encode()


def may_count(low: bytes) -> bool:
    """Return whether a text in lower case may contain the name of a value."""
    return any(part in low for part in _ENCODED) or _LOW_MARK in low


def read_report(values: Mapping[str, object]) -> tuple[float | None, dict[str, float]]:
    """Return the step of a report, or None, and its results."""
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST
    }
    step = next((numbers[name] for name in REPORTED_STEPS if name in numbers), None)
    return step, {name: each for name, each in numbers.items() if name not in NO_RESULTS}
