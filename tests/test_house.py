"""scripts/house: the source stays below its ceilings, and the script says when it does not."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SCRIPT = ROOT / "scripts" / "house"


def house(*arguments: str, ceilings: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script, with other ceilings if they are given."""
    code = (
        "import pathlib, runpy, sys\n"
        f"script = runpy.run_path({str(SCRIPT)!r})\n"
        f"main, ceilings = script['main'], {str(ceilings or '')!r}\n"
        "if ceilings: main.__globals__['CEILINGS'] = pathlib.Path(ceilings)\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_the_source_stays_below_its_ceilings() -> None:
    done = house()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_number_above_its_ceiling_is_named_and_a_ceiling_only_goes_down(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "house.toml").read_text()
    kept = tmp_path / "house.toml"
    low = text.replace("product_files = ", "product_files = 1 #").replace(
        "public_names = ", "public_names = 9_999 #"
    )
    kept.write_text(low)
    done = house("--lower", ceilings=kept)
    assert done.returncode == 1
    (named,) = [line for line in done.stdout.splitlines() if "above its ceiling" in line]
    assert named.startswith("product_files")
    assert "product_files = 1 #" in kept.read_text()
    assert "9_999" not in kept.read_text()
