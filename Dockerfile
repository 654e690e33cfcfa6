# A service of task files: docker run -p 8000:8000 -v $PWD/tasks:/tasks:ro spalier serve /tasks --base ... --host 0.0.0.0
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
# the build of torch for processors alone: the one on PyPI brings gigabytes for GPUs
RUN pip install --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[cli,serve]' \
    && useradd --uid 10001 --no-create-home spalier

USER 10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["spalier"]
CMD ["serve", "/tasks", "--host", "0.0.0.0"]
