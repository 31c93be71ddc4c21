"""The functions for function platforms: what they make of events in the providers' documented forms."""

import ast

import pytest

from cavvy.capabilities.serving.cloud_events import parse_event
from cavvy.cloud_functions import PLATFORMS, read_function
from cavvy.cloud_functions.aws_lambda import read_bridge_event, read_record

# https://docs.aws.amazon.com/lambda/latest/dg/with-sqs.html, read 2026-11-24, shortened
SQS = {
    "messageId": "059f36b4-87a3-44ab-83d2-661975830a7d",
    "body": "Test message.",
    "eventSource": "aws:sqs",
    "eventSourceARN": "arn:aws:sqs:us-east-2:123456789012:my-queue",
    "awsRegion": "us-east-2",
}
# https://docs.aws.amazon.com/eventbridge/latest/ref/overiew-event-structure.html
BRIDGE = {
    "version": "0",
    "id": "6a7e8feb-b491-4cf7-a9f1-bf3703467718",
    "detail-type": "EC2 Instance State-change Notification",
    "source": "aws.ec2",
    "account": "111122223333",
    "time": "2017-12-22T18:43:48Z",
    "region": "us-west-1",
    "resources": ["arn:aws:ec2:us-west-1:123456789012:instance/i-1234567890abcdef0"],
    "detail": {"instance-id": " i-1234567890abcdef0", "state": "terminated"},
}


def test_events_of_aws_become_events_with_the_ids_of_aws() -> None:
    message = parse_event({"specversion": "1.0", **read_record(SQS)})
    assert (message.id, message.source) == (SQS["messageId"], SQS["eventSourceARN"])
    event = {"specversion": "1.0", **read_bridge_event(BRIDGE)}
    assert parse_event(event).id == BRIDGE["id"]
    assert event["data"] == BRIDGE["detail"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_function_is_one_file_of_the_standard_library(platform: str) -> None:
    tree = ast.parse(read_function(platform))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in node.names]
        )
    }
    assert imported <= {"base64", "hashlib", "hmac", "json", "os", "time", "typing", "urllib"}
