"""Installs every package beside this file as a subpackage of spmdkit: mesh/ as spmdkit.mesh. See pyproject.toml."""

from setuptools import find_packages, setup

packages = find_packages(exclude=["spmdkit", "spmdkit.*", "tests*", "benchmarks*", "docs*", "examples*", "build*"])

setup(
    packages=["spmdkit", *find_packages(include=["spmdkit.*"]), *(f"spmdkit.{name}" for name in packages)],
    package_dir={"spmdkit": "spmdkit"} | {f"spmdkit.{name}": name for name in packages if "." not in name},
)
