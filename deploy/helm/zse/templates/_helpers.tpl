{{- define "zse.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 55 | trimSuffix "-" -}}
{{- end -}}
{{- define "zse.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "zse.labels" -}}
{{ include "zse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}
{{/* A value of zse.toml. Numbers of Helm are floats: 3600 must not become 3600.0 or 3.6e+03. */}}
{{- define "zse.toml" -}}
{{- if kindIs "slice" . -}}{{ . | toJson }}
{{- else if kindIs "string" . -}}{{ . | toJson }}
{{- else if kindIs "bool" . -}}{{ . }}
{{- else if eq (float64 (int64 .)) (float64 .) -}}{{ int64 . }}
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}
