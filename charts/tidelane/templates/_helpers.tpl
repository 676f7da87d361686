{{- define "tidelane.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tidelane.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tidelane.labels" -}}
{{ include "tidelane.selector" . }}
app.kubernetes.io/part-of: tidelane
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tidelane.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "tidelane.agent.namespace" -}}
{{ .Values.agent.namespace | default .Release.Namespace }}
{{- end -}}

{{/* Annotations of a CRD; without indentation. */}}
{{- define "tidelane.crd.annotations" -}}
annotations:
  tidelane.dev/chart-version: {{ .Chart.Version | quote }}
  {{- if .Values.crds.keep }}
  helm.sh/resource-policy: keep
  {{- end }}
{{- end -}}

{{- define "tidelane.tls.operatorSecret" -}}
{{- if eq .Values.tls.mode "secrets" -}}
{{ required "tls.mode is secrets: set tls.operatorSecret" .Values.tls.operatorSecret }}
{{- else -}}
{{ include "tidelane.fullname" . }}-operator-tls
{{- end -}}
{{- end -}}

{{- define "tidelane.tls.agentSecret" -}}
{{- if eq .Values.tls.mode "secrets" -}}
{{ required "tls.mode is secrets: set tls.agentSecret" .Values.tls.agentSecret }}
{{- else -}}
{{ include "tidelane.fullname" . }}-agent-tls
{{- end -}}
{{- end -}}

{{/*
Generated keys, as JSON of two Secrets' data, already in base64: those in the cluster if both are there, else new ones.
One render makes them once, so that the checksums in the pod templates are those of what is stored.
Each side has an authority of its own, whose key nobody keeps: an agent's key opens no other agent.
*/}}
{{- define "tidelane.tls.data" -}}
{{- if not (hasKey .Values "generatedTls") -}}
{{- $operator := lookup "v1" "Secret" .Release.Namespace (include "tidelane.tls.operatorSecret" .) -}}
{{- $agent := lookup "v1" "Secret" (include "tidelane.agent.namespace" .) (include "tidelane.tls.agentSecret" .) -}}
{{- $data := dict -}}
{{- if and $operator $agent -}}
{{- $data = dict "operator" $operator.data "agent" $agent.data -}}
{{- else -}}
{{- $days := int .Values.tls.validityDays -}}
{{- $operatorCa := genCA "tidelane-operator-ca" $days -}}
{{- $agentCa := genCA "tidelane-agent-ca" $days -}}
{{- $name := .Values.tls.agentName -}}
{{- $operatorPair := genSignedCert "tidelane-operator" nil nil $days $operatorCa -}}
{{- $agentPair := genSignedCert $name nil (list $name) $days $agentCa -}}
{{- $operatorData := dict "tls.crt" ($operatorPair.Cert | b64enc) "tls.key" ($operatorPair.Key | b64enc) "ca.crt" ($agentCa.Cert | b64enc) -}}
{{- $agentData := dict "tls.crt" ($agentPair.Cert | b64enc) "tls.key" ($agentPair.Key | b64enc) "ca.crt" ($operatorCa.Cert | b64enc) -}}
{{- $data = dict "operator" $operatorData "agent" $agentData -}}
{{- end -}}
{{- $_ := set .Values "generatedTls" (toJson $data) -}}
{{- end -}}
{{ .Values.generatedTls }}
{{- end -}}

{{/* What the operator may do in the namespaces that it looks after; tests/e2e/test_chart_rbac.py shows each needed. */}}
{{- define "tidelane.operator.rules" -}}
- apiGroups: [tidelane.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
# Of the object itself it writes nothing but its finalizer, which the API server takes as a patch of the object.
- apiGroups: [tidelane.dev]
  resources: [inferenceservices]
  verbs: [patch]
- apiGroups: [tidelane.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
# Its children block their owner's deletion, which clusters with OwnerReferencesPermissionEnforcement allow only so.
- apiGroups: [tidelane.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
# A server-side apply is a patch, and needs create where it creates.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
