"""Personal data: the rules, the places where values are kept, and the detectors that find them."""

from .harness.privacy.detector import (
    Detector,
    FoundValue,
    PiighostDetector,
    PresidioDetector,
)
from .harness.privacy.value_vault import (
    ValueFile,
    ValueVault,
)
from .policies.privacy_rules import (
    PrivacyRules,
)

__all__ = [
    "Detector",
    "FoundValue",
    "PiighostDetector",
    "PresidioDetector",
    "PrivacyRules",
    "ValueFile",
    "ValueVault",
]
