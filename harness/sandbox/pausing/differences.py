"""The errors that say what differs where a paused session cannot be resumed."""

from ....policies.errors import PauseDiffers

OTHER_LAUNCHER = (
    "its launcher ended or was replaced, and it does not have the addresses of another one"
)
_HINT = "Sandbox(pausable=True) pauses sessions that can be resumed after a restart"


def differing(differs: tuple[str, ...], *, is_final: bool = True) -> PauseDiffers:
    """Return the error; `is_final`: the session can never be resumed here."""
    message = f"token: the paused session cannot be resumed here: {'; '.join(differs)}"
    error = PauseDiffers(message, _HINT if OTHER_LAUNCHER in differs else "", differs=differs)
    error.is_final = is_final
    return error


def launcher_ended() -> PauseDiffers:
    return differing((OTHER_LAUNCHER,))
