"""All metadata is in pyproject.toml; this file lets old tools install the checkout too."""

from setuptools import setup

setup()
