"""Options of operators that several servers share."""

import argparse


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
