"""HTTP requests that do not follow redirects. A redirect could send a token to another address,
such as the login page of a proxy, and would repeat a POST without its body.
"""

import urllib.request


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes `urllib` treat redirects as errors instead of following the redirects."""

    def redirect_request(self, *_: object) -> None:
        return None
