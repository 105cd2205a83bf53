"""Options of operators that several servers share."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..servers.operations.observation import OperatorSettings


def add_operations(parser: argparse.ArgumentParser) -> None:
    """Add --metrics, --request-log and --otel."""
    parser.add_argument(
        "--metrics", metavar="ADDRESS",
        help="answer /metrics (Prometheus), /healthz and /readyz at HOST:PORT, or at this path of a "
        "socket (extra metrics)",
    )  # fmt: skip
    parser.add_argument(
        "--request-log", metavar="FILE",
        help="append a line of JSON for each request to this file, - for stderr",
    )  # fmt: skip
    parser.add_argument(
        "--otel", action="store_true",
        help="send spans and metrics by OTLP, as OTEL_EXPORTER_OTLP_ENDPOINT says (extra otlp)",
    )  # fmt: skip


def operations_of(options: argparse.Namespace) -> "OperatorSettings":
    """Return what the options of `add_operations` and --audit ask for."""
    from ..servers.operations.observation import OperatorSettings

    return OperatorSettings(options.audit, options.metrics, options.request_log, options.otel)
