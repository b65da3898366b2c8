"""How every command of maxmoe reads its flags."""

import sys
from collections.abc import Callable

from absl import app, flags


def flags_parser(command: str) -> Callable[[list[str]], list[str]]:
    """For `app.run`: --help is no failure, and a mistake has the exit code of all mistakes, 2.

    Args:
      command: Its name, which stands before what is wrong.
    """

    def parse(argv: list[str]) -> list[str]:
        if {"--help", "-help", "-h", "-?"} & set(argv[1:]):
            app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            sys.stderr.write(f"{command}: {error}\n--help shows every flag.\n")
            sys.exit(2)

    return parse
