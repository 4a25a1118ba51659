"""Adds the shipped YAML files, which stand at the top of the checkout, to the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# Looked up by `cato.config.paths` after everything that a user has written.
FOLDERS = ("workflows", "profiles", "deployments")


class WithShippedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in FOLDERS:
            target = Path(self.build_lib) / "cato" / "shipped" / folder
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithShippedFiles})
