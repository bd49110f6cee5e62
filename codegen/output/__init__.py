"""The files that `apply` leaves behind: imports that work elsewhere, manifest, safe writing."""
