# The `cavvy` command, from the locked versions: `make dist` builds it.
FROM python:3.12-slim AS build
WORKDIR /src
COPY requirements/base.lock requirements/base.lock
RUN python -m venv /opt/cavvy && /opt/cavvy/bin/pip install --no-cache-dir --require-hashes -r requirements/base.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/cavvy/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends git openssh-client \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home cavvy
COPY --from=build /opt/cavvy /opt/cavvy
ENV PATH=/opt/cavvy/bin:$PATH CAVVY_HOME=/home/cavvy/.cavvy
USER cavvy
WORKDIR /home/cavvy
VOLUME /home/cavvy/.cavvy
ENTRYPOINT ["cavvy"]
CMD ["--help"]
