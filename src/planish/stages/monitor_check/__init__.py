"""The monitor stage: looks for a faulty machine while another stage works."""
