"""Scripts of the folder ``examples`` that ``flatout demo`` runs. Each is a link, so that a wheel holds the script."""
