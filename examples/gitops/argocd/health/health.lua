-- The health of an InferenceService or an SLOPolicy, for Argo CD. What an earlier spec came to says nothing of this one.
-- A missed target does not make a service unhealthy, for another roll-out would not mend it: its message says so.
local generation = obj.metadata.generation
if obj.metadata.deletionTimestamp ~= nil then
  return {status = "Progressing", message = "it is being deleted"}
end
local seen = obj.status ~= nil and obj.status.observedGeneration or -1
if seen == -1 then
  return {status = "Progressing", message = "the operator has not seen it yet"}
end
if seen ~= generation then
  return {status = "Progressing", message = "its status still speaks of generation " .. seen}
end

local conditions = {}
for _, condition in ipairs(obj.status.conditions or {}) do
  if condition.observedGeneration == generation then
    conditions[condition.type] = condition
  end
end

local function says(name, status)
  return conditions[name] ~= nil and conditions[name].status == status
end

local function told(name)
  local message = conditions[name].message
  if message == nil or message == "" then
    return conditions[name].reason
  end
  return conditions[name].reason .. ": " .. message
end

if says("Stalled", "True") then
  return {status = "Degraded", message = told("Stalled")}
end
if not says("Ready", "True") then
  return {status = "Progressing", message = conditions.Ready and told("Ready") or "not judged yet"}
end
for _, name in ipairs({"SLOMet", "SLOFeasible", "Attainable"}) do
  if says(name, "False") then
    return {status = "Healthy", message = name .. " is False, " .. told(name)}
  end
end
return {status = "Healthy", message = told("Ready")}
