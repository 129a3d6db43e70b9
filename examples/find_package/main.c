#include <stdio.h>

#include "uniep/c_api.h"

/* Prints the Schedule that UniEP chooses for a layer on four ranks, and shows that an error arrives as one. */
int main(void) {
  const uniep_group_options options = {.size = sizeof(options), .ranks = 4};
  const uniep_layer_config config = {
      .size = sizeof(config), .hidden = 1024, .intermediate = 512, .experts = 32, .topk = 4};
  uniep_group* group = NULL;
  char json[4096];
  size_t needed = 0;
  uniep_status status = uniep_group_create(&options, &group);
  if (status == UNIEP_OK) {
    status = uniep_schedule_resolve(group, &config, UNIEP_FORWARD, "auto", json, sizeof(json), &needed);
  }
  if (status != UNIEP_OK || uniep_version() != UNIEP_VERSION) {
    fprintf(stderr, "%s: %s\n", uniep_status_name(status), uniep_last_error());
    return 1;
  }
  printf("UniEP %s: %s\n", uniep_version_string(), json);
  status = uniep_schedule_resolve(group, &config, UNIEP_FORWARD, "fusion=all", json, sizeof(json), &needed);
  printf("%s: %s\n", uniep_status_name(status), uniep_last_error());
  uniep_group_destroy(group);
  return status == UNIEP_INVALID_ARGUMENT ? 0 : 1;
}
