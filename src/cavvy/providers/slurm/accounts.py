"""Compares a user and an account with the cluster's accounting data. No I/O."""

from collections.abc import Mapping, Sequence

from cavvy.providers.base import Refused

Facts = Sequence[tuple[str, str]]
_ENFORCING = {
    "associations",
    "limits",
    "qos",
    "safe",
    "wckeys",
    "all",
}  # the values of AccountingStorageEnforce with which jobs need an association


def explain_accounts(
    account: str, user: str, config: Mapping[str, str], tools: Sequence[str], limits: Facts
) -> Facts:
    """Return the facts about the account for `cavvy check`. `limits` are the limits of the user's
    associations. If `account` is "", jobs use the user's default account.

    Raises Refused if Slurm would refuse every job because of its account.
    """
    names = list(
        dict.fromkeys(
            what.removeprefix("account ") for what, _ in limits if what.startswith("account ")
        )
    )
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        why = "the cluster stores no accounting data (slurmdbd)"
    elif "sacctmgr" not in tools:
        why = "the login node has no sacctmgr"
    elif not names:  # `limits` may still list qualities of service, which apply to all users
        why = f"the cluster's accounting does not list {user}"
    else:
        told = [("account", account)] if account else []
        _refuse(account, user, config, names)
        return [*told, ("limits", "known to the cluster's accounting"), *limits]
    told = [("account", f"{account}: could not be checked: {why}")] if account else []
    return [*told, ("limits", why), *limits]


def _refuse(account: str, user: str, config: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise Refused if Slurm requires that the user has an association with the account, but the
    user has none.
    """
    enforced = {
        word.strip().lower() for word in config.get("AccountingStorageEnforce", "").split(",")
    }
    if (
        account
        and account.lower() not in {name.lower() for name in names}
        and enforced & _ENFORCING
    ):
        raise Refused(
            f"the setting `account` of [providers.slurm] is {account}, which is not an account of "
            f"{user}, so Slurm would refuse every job: use one of {', '.join(names)}, or remove "
            "the setting to use the default account"
        )
