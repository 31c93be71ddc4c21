"""The pages: each module fetches what its page shows, and names the template that shows it."""
