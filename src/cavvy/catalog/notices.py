"""The notice that each provider gives before it reclaims a spot node, according to the providers'
own pages.
"""

from datetime import timedelta

# AWS: "a warning that is issued two minutes before Amazon EC2 stops or terminates your Spot
# Instance", docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html.
# Google Cloud: a shutdown period of up to 30 seconds, cloud.google.com/compute/docs/instances/spot.
# Azure: a `Preempt` event at least 30 seconds before,
# learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. No other provider is known to
# promise a notice.
SPOT_NOTICES = {
    "aws": timedelta(minutes=2),
    "azure": timedelta(seconds=30),
    "gcp": timedelta(seconds=30),
}
