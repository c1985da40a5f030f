"""Text, JSON, Markdown and HTML from views."""
