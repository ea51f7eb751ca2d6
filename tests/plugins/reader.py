"""TEI: XML in which each `<div>` is a document."""

from xml.etree import ElementTree

from antlm_jax.data.readers import READERS, open_file


@READERS.register(".tei")
def read(path, columns):
  """Yields the documents of a file, which may be compressed."""
  try:
    with open_file(path) as file:
      root = ElementTree.parse(file).getroot()
  except ElementTree.ParseError as error:
    raise ValueError(f"not XML: {error}") from error
  for number, div in enumerate(root.iter("div"), start=1):
    yield f"div {number}", {"text": "".join(div.itertext())}
