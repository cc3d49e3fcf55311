# The programs and libtorch for CPUs; for GPUs build with `--build-arg FULL_TORCH=1`, and run with the driver of the host.
#
#   docker build -t deepspec --build-arg COMMIT="$(git rev-parse --short=12 HEAD)" . && docker run --rm -v "$PWD/runs:/runs" deepspec deepspec-eval --help
FROM rust:1-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG FULL_TORCH=0
# What --version says; the image's build does not see the repository.
ARG COMMIT=
ENV DEEPSPEC_COMMIT=$COMMIT
RUN DEEPSPEC_FULL_TORCH=$FULL_TORCH scripts/setup.sh && cargo build --release --locked --bins \
    && mkdir -p /deepspec/bin \
    && for program in data train eval; do strip --strip-debug -o /deepspec/bin/deepspec-$program target/release/deepspec-$program; done \
    && cp -r configs eval_datasets assets /deepspec && python3 scripts/licences.py /deepspec/THIRD-PARTY.md \
    && echo "libtorch $(/src/target/release/deepspec-eval --version | sed -n 's/^libtorch //p')" >/deepspec/LIBTORCH \
    && cp scripts/install-libtorch.sh LICENSE /deepspec && DEEPSPEC_FULL_TORCH=$FULL_TORCH /deepspec/install-libtorch.sh

# Of the same Debian, whose C and C++ libraries the programs were linked with.
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libstdc++6 libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /deepspec /deepspec
ENV PATH=/deepspec/bin:$PATH
WORKDIR /deepspec
CMD ["deepspec-eval", "--help"]
