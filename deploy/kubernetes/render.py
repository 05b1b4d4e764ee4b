"""Writes prefixd.yaml: the chart with its default values, for clusters without Helm.

`.venv/bin/python deploy/kubernetes/render.py` (after `make install-operator`), or
`helm template prefixd deploy/helm/prefixd --namespace prefixd`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[1] / "helm/prefixd"
PLAIN = Path(__file__).with_name("prefixd.yaml")
_HEAD = """\
# A daemon on every node: kubectl apply -f prefixd.yaml. Made of ../helm/prefixd with its default values by render.py;
# change image, sizes and nodeSelector. The namespace is privileged, since the pods have folders of the node (hostPath).
apiVersion: v1
kind: Namespace
metadata:
  name: prefixd
  labels:
    pod-security.kubernetes.io/enforce: privileged
"""


def render(values: dict[str, Any] | None = None) -> dict[str, str]:
    """The chart's manifests by the names of their templates, as Helm renders them. Raises HelmError."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        manifests = chart.render(values, name="prefixd", namespace="prefixd")
    texts = {Path(name).name: text for name, text in manifests.items()}
    return {name: text.strip() + "\n" for name, text in texts.items() if name.endswith(".yaml") and text.strip()}


def plain() -> str:
    """The text of prefixd.yaml."""
    return "---\n".join([_HEAD, *render().values()])


if __name__ == "__main__":
    PLAIN.write_text(plain())
