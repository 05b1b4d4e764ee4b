{{- define "prefixd.selector" -}}
app.kubernetes.io/name: prefixd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prefixd.labels" -}}
{{ include "prefixd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
