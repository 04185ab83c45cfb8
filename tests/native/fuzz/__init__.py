"""Random calls of the native core: any arguments may raise, none may crash the process."""
