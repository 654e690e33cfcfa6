"""The harness for atheris is a program of its own, and atheris is not installed everywhere."""

collect_ignore = ["atheris_loader.py"]
