"""Measurements as lines of JSON in a file, each with the settings that it was taken with: a run that was cut goes on behind those that
are there, and lines of other settings, as of another GPU, stay what they are."""

import datetime
import json
import os
import subprocess


def device_name():
    """Of the first GPU, for scripts without torch; None where nvidia-smi shows none."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


class Records:
    def __init__(self, path, settings):
        """Without a path nothing is kept. `settings`: of all that this run measures, as JSON has them."""
        self.path, self.settings, self.rows = path, settings, []
        if path and os.path.exists(path):
            with open(path) as file:
                self.rows = [json.loads(line) for line in file]

    def find(self, **key):
        """The record of this key with this run's settings, or None."""
        wanted = {**self.settings, **key}
        return next((row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())), None)

    def add(self, **record):
        row = {**self.settings, "date": datetime.date.today().isoformat(), **record}
        self.rows.append(row)
        if self.path:
            with open(self.path, "ab", buffering=0) as file:  # one write: no line is cut with the run
                file.write(json.dumps(row).encode() + b"\n")
        return row
