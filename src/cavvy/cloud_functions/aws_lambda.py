"""AWS Lambda: the handler is `lambda_handler`, for events of S3, SQS and EventBridge."""

from typing import Any

from cavvy.cloud_functions.forward import forward


def lambda_handler(event: dict[str, Any], context: object) -> None:
    if "Records" in event:
        forward([read_record(each) for each in event["Records"]])
    else:
        forward([read_bridge_event(event)])


def read_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return the CloudEvent for a record of S3 or SQS."""
    if record.get("eventSource") == "aws:sqs":
        return {
            "id": record["messageId"],
            "source": record["eventSourceARN"],
            "type": "com.amazonaws.sqs.message",
            "data": record["body"],
        }
    # as in cloudevents/adapters/aws-s3.md of https://github.com/cloudevents/spec
    answer, stored = record["responseElements"], record["s3"]
    return {
        "id": f"{answer['x-amz-request-id']}.{answer['x-amz-id-2']}.{stored['object']['key']}",
        "source": f"{record['eventSource']}.{record['awsRegion']}.{stored['bucket']['name']}",
        "type": f"com.amazonaws.s3.{record['eventName']}",
        "subject": stored["object"]["key"],
        "time": record["eventTime"],
        "data": stored,
    }


def read_bridge_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return the CloudEvent for an event of EventBridge."""
    return {
        "id": event["id"],
        "source": event["source"],
        "type": event["detail-type"],
        "time": event["time"],
        "data": event["detail"],
    }
