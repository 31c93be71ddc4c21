# The `cavvy` command and what a server needs, from the locked versions: `make dist` builds it.
FROM python:3.12-slim AS build
WORKDIR /src
COPY requirements/server.lock requirements/server.lock
RUN python -m venv /opt/cavvy && /opt/cavvy/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/server.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/cavvy/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends git openssh-client \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 1000 cavvy
COPY --from=build /opt/cavvy /opt/cavvy
ENV PATH=/opt/cavvy/bin:$PATH CAVVY_HOME=/home/cavvy/.cavvy
USER cavvy
WORKDIR /home/cavvy
# A new volume gets the owner and the mode of this folder.
RUN mkdir --mode=700 /home/cavvy/.cavvy
VOLUME /home/cavvy/.cavvy
ENTRYPOINT ["cavvy"]
CMD ["--help"]
