"""Rules about personal data: its kinds, and where values may go."""

import re
from typing import Literal, get_args

import msgspec

from .errors import PolicyError

# Kinds that detectors find by form, checked where the kind has a check.
KINDS = (
    "email", "phone", "iban", "card", "ssn", "nino", "nhs", "taxid", "nir", "dni", "fiscal", "pesel",
    "cpf", "aadhaar", "sin", "personnummer", "ip", "mac", "login", "secret",
)  # fmt: skip
# Compiled when they are used: few policies have such rules.
_KIND = r"[a-z][a-z0-9]{1,15}"
_PLACE = r"[^\s:]+:[^\s:]+"
SOURCE_NAME = r"env:.+|file:/.+|keyring:[^/]+/.+"
SOURCE_FORM = "env:NAME, file:/PATH or keyring:SERVICE/USER"

Inputs = Literal["tokens", "texts", "values"]
Scope = Literal["vault", "session"]


class PrivacyRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Personal data: replaced by tokens before a program or a model sees it.

    enabled: the rules hold
    kinds: what is looked for, of KINDS; empty means all
    fields: places in results of tools, such as "crm.find:customers[].name" -> kind; whatever stands
        there is personal data, as it is where the schema of a tool says `x-pii`
    names: words that are personal data wherever they stand
    regions: countries whose national phone numbers are found (ISO 3166)
    restore: places in arguments of tools, such as "mail.send:to", where tokens become values again
    inputs: what programs get of the inputs, files and standard input of a call: "tokens", and content
        that is no text is refused; "texts", it is passed on; "values", all is passed on unchanged
    scope: "vault", a value has one token everywhere; "session", another one in each session
    keep_days: how long a value is kept after it was last found
    vault: the file that keeps values; empty means in memory
    key: the source of that file's key: env:NAME, file:/PATH or keyring:SERVICE/USER
    """

    enabled: bool = False
    kinds: tuple[str, ...] = ()
    fields: dict[str, str] = {}
    names: tuple[str, ...] = ()
    regions: tuple[str, ...] = ("US",)
    restore: tuple[str, ...] = ()
    inputs: Inputs = "tokens"
    scope: Scope = "vault"
    keep_days: float = 30
    vault: str = ""
    key: str = ""


def check_privacy(rules: PrivacyRules, where: str = "privacy") -> PrivacyRules:
    """Return `rules`; raises PolicyError, which names the first invalid field."""
    for name, kind in (
        *(("kinds", each) for each in rules.kinds),
        *(("fields", each) for each in rules.fields.values()),
    ):
        if name == "kinds" and kind not in KINDS:
            raise PolicyError(f"{where}.kinds: must be of {', '.join(KINDS)}, got {kind!r}")
        if not re.fullmatch(_KIND, kind):
            raise PolicyError(
                f"{where}.{name}: must be lower-case letters and digits, got {kind!r}"
            )
    for name in ("fields", "restore"):
        for place in getattr(rules, name):
            if not re.fullmatch(_PLACE, place):
                raise PolicyError(f"{where}.{name}: must be TOOL:PATH, got {place!r}", _AN_EXAMPLE)
    for region in rules.regions:
        if not (len(region) == 2 and region.isascii() and region.isalpha() and region.isupper()):
            raise PolicyError(f"{where}.regions: must be two letters such as US, got {region!r}")
    _check_choices(rules, where)
    if not rules.enabled and rules != PrivacyRules():
        raise PolicyError(
            f"{where}.enabled: must be true, since there are rules", "enabled = true in [privacy]"
        )
    return rules


_AN_EXAMPLE = 'for example "mail.send:to", or "crm.find:customers[].name"'


def _check_choices(rules: PrivacyRules, where: str) -> None:
    for name, known in (("inputs", get_args(Inputs)), ("scope", get_args(Scope))):
        if getattr(rules, name) not in known:
            raise PolicyError(f"{where}.{name}: must be one of {', '.join(known)}")
    if not 0 < rules.keep_days <= 100_000:
        raise PolicyError(f"{where}.keep_days: must be above 0, got {rules.keep_days}")
    if rules.key and not re.fullmatch(SOURCE_NAME, rules.key):
        raise PolicyError(f"{where}.key: must be {SOURCE_FORM}")
    if bool(rules.vault) != bool(rules.key):
        raise PolicyError(
            f"{where}.vault: needs privacy.key, and the other way round",
            "a vault in memory needs neither",
        )


def narrow_privacy(some: PrivacyRules, other: PrivacyRules) -> PrivacyRules:
    """Return the rules that find what either finds, and restore where both do."""
    if not (some.enabled and other.enabled):
        return some if some.enabled else other
    return msgspec.structs.replace(
        some,
        kinds=_joined(some.kinds, other.kinds) if some.kinds and other.kinds else (),
        fields={**other.fields, **some.fields},
        names=_joined(some.names, other.names),
        regions=_joined(some.regions, other.regions),
        restore=tuple(each for each in some.restore if each in other.restore),
        inputs=min(some.inputs, other.inputs, key=get_args(Inputs).index),
        scope=max(some.scope, other.scope, key=get_args(Scope).index),
        keep_days=min(some.keep_days, other.keep_days),
        vault=some.vault or other.vault, key=some.key or other.key,
    )  # fmt: skip


def privacy_exceeds(some: PrivacyRules, limit: PrivacyRules) -> list[str]:
    """Return what `some` lets a model see and `limit` does not, a line each."""
    if not limit.enabled:
        return []
    if not some.enabled:
        return ["privacy.enabled: personal data is passed on"]
    missing = [kind for kind in limit.kinds or KINDS if some.kinds and kind not in some.kinds]
    found = [f"privacy.kinds: values of the kind {kind}" for kind in missing]
    found += [f"privacy.fields: {each}" for each in limit.fields if each not in some.fields]
    found += [f"privacy.names: {each}" for each in limit.names if each not in some.names]
    found += [f"privacy.regions: {each}" for each in limit.regions if each not in some.regions]
    found += [f"privacy.restore: {each}" for each in some.restore if each not in limit.restore]
    if get_args(Inputs).index(some.inputs) > get_args(Inputs).index(limit.inputs):
        found.append(f"privacy.inputs: {some.inputs} instead of {limit.inputs}")
    if some.scope == "vault" and limit.scope == "session":
        found.append("privacy.scope: tokens of other sessions")
    return found


def _joined(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*some, *others)))
