"""Programs that are run as short-lived children, because what they call may hang or end the process."""
