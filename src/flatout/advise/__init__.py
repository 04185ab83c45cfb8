"""Advice on a script: causes that slow the script down, by file and line, measured gains, and a diff of the files."""
