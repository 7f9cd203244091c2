"""Lists the packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

mapped = {"distillspec." + name for name in find_packages(include=["serving*", "conf*", "recipes*"])}
setup(packages=sorted(mapped.union(find_packages(include=["distillspec*"]))))
