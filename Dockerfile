# docker build --target cpu -t longtail:cpu .      docker build --target cuda -t longtail:cuda .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" longtail:cpu train photos --out runs/photos

FROM python:3.12-slim-bookworm AS source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY docs docs
COPY src src
RUN pip install --constraint constraints.txt pip

FROM source AS cpu
# Of the two builds of a version, pip prefers the one with the label "+cpu", which has no CUDA libraries.
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt --build-constraint constraints.txt ".[offline,export]"
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["longtail"]
CMD ["--help"]

# The wheels of torch bring the CUDA libraries, so only the driver of the host is needed. torch.compile needs a C compiler.
FROM source AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint constraints.txt --build-constraint constraints.txt ".[offline,export]"
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["longtail"]
CMD ["--help"]
