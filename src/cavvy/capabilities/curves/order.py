"""In which order curves are shown."""

_FIRST = ("loss",)
_THEN = ("acc", "f1", "auc", "reward", "return", "score", "ppl", "perplexity", "error", "mse")
_LAST = ("lr", "learning_rate", "norm", "scale", "time", "tps", "wps", "ups", "fps", "flops", "mfu")


def prominence(name: str) -> tuple[int, str]:
    """Return a key that sorts losses first, then other results, and speeds and settings last."""
    words = name.lower()
    if any(each in words for each in _LAST):
        return 3, name
    if any(each in words for each in _FIRST):
        return 0, name
    return (1 if any(each in words for each in _THEN) else 2), name
