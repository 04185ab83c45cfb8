"""Random calls of the native core. Any argument may cause an exception, but none may crash the process."""
