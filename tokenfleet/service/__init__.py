"""Plan jobs over HTTP: kept in SQLite, run in processes of their own, outliving the service."""
