{{- define "kvanta.name" -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "kvanta.selector" -}}
app.kubernetes.io/name: kvanta
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvanta.metadata" -}}
name: {{ include "kvanta.name" . }}
labels:
  {{- include "kvanta.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
