"""vLLM's own `vllm serve`, without the rest of its command line, which its build for CPUs cannot start."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    """arguments: the model, then vLLM's options."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser, command = FlexibleArgumentParser(prog="kvcompress"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    given = parser.parse_args(["serve", *arguments])
    configure_logging_from_args(given)
    command.validate(given)
    command.cmd(given)


if __name__ == "__main__":
    main(sys.argv[1:])
