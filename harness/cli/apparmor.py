"""An AppArmor profile for hosts that keep user namespaces from programs without one (Ubuntu 24.04)."""

import re

_PROFILE = """\
# Printed by `cellwright doctor --apparmor`, for AppArmor 4 and newer.  It confines nothing: whatever
# runs this Python may make user namespaces, and has in them the powers that come with those.
abi <abi/4.0>,
include <tunables/global>

profile cellwright "{path}" flags=(unconfined) {{
  userns,

  include if exists <local/cellwright>
}}
"""


def profile(interpreter: str) -> str:
    """Return the profile that permits user namespaces to `interpreter`, which launchers run.

    AppArmor goes by the file that is executed, whatever link it was called by.
    """
    return _PROFILE.format(path=re.sub(r'[\\"*?\[\]{}^]', r"\\\g<0>", interpreter))
