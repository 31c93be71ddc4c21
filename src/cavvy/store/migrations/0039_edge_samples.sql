-- Requests whose answers were uncertain, as devices have sent them.
CREATE TABLE edge_samples (
    project TEXT NOT NULL,
    device {id} NOT NULL,
    number BIGINT NOT NULL,  -- of the device
    model TEXT NOT NULL,
    residency TEXT NOT NULL,  -- the area or country that the sample must not leave, or ''
    received_at BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (project, device, number)
);
CREATE INDEX edge_samples_model ON edge_samples (project, model, received_at);
