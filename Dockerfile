# nearkin on CPUs:
#
#     docker build -t nearkin .
#     docker run --rm --shm-size 2g --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD:/work" \
#         nearkin train photos/ --epochs 100
FROM python:3.13-slim AS build
COPY . /source
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist /source

FROM python:3.13-slim
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /dist /dist
RUN pip install --no-cache-dir /dist/*.whl && rm -r /dist && useradd --create-home nearkin
USER nearkin
WORKDIR /work
ENTRYPOINT ["nearkin"]
CMD ["--help"]
