"""What has become of generated files since they were written: upstream, the tool, or by hand."""
