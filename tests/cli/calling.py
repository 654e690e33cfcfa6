"""The command line, called in this process."""

import json
from dataclasses import dataclass

from spalier.cli.main import main


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def call(capsys, *arguments) -> Called:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return Called(code, out, err)
