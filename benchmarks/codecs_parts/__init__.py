"""What codecs save and cost, a file a part."""
