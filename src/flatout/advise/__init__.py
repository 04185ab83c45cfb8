"""``flatout advise``: causes that slow a script down by file and line, measured gains, and a diff of its files."""
