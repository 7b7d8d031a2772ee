# The image of all roles: `docker build -t shoal .`. The first stage compiles; the second has the package and nothing
# that builds it. `docker build --build-arg EXTRAS=[ray] -t shoal-ray .` adds extras, such as Ray.
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make ninja-build \
    && rm -rf /var/lib/apt/lists/*
ARG EXTRAS=
WORKDIR /src
COPY pyproject.toml CMakeLists.txt CMakePresets.json README.md LICENSE ./
COPY csrc csrc
COPY licenses licenses
COPY python python
RUN python -m venv /opt/shoal \
    && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && /opt/shoal/bin/pip install --no-cache-dir "$(echo /wheels/shoal-*.whl)${EXTRAS}" \
    && /opt/shoal/bin/pip uninstall --yes pip \
    && find /opt/shoal -name tests -type d -prune -exec rm -rf {} + \
    && find /opt/shoal -name '*.pyi' -delete \
    && /opt/shoal/bin/shoal --version

FROM python:3.13-slim
COPY --from=build /opt/shoal /opt/shoal
ENV PATH=/opt/shoal/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["shoal"]
