// A real OpenID server for tests: npm's oidc-provider, with a public client for terminals.
// node openid_provider.mjs FOLDER PORT PEOPLE.json; PEOPLE maps a login to the claims of a person,
// and is read again at each sign-in. A person who is removed from it cannot sign in any more.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, port, people] = process.argv.slice(2);
const main = pathToFileURL(`${folder}/node_modules/oidc-provider/lib/index.js`);
const { default: Provider } = await import(main);

const terminal = (client_id) => ({
  client_id,
  application_type: "native",
  token_endpoint_auth_method: "none",
  grant_types: ["urn:ietf:params:oauth:grant-type:device_code", "refresh_token"],
  response_types: [],
  redirect_uris: [],
});
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [terminal("cavvy"), terminal("expired"), terminal("other")],
  claims: { openid: ["sub"], email: ["email", "email_verified"], groups: ["groups"] },
  conformIdTokenClaims: false, // the claims are in the ID token, where Cavvy reads them
  features: { deviceFlow: { enabled: true } },
  cookies: { keys: ["of a test"] },
  ttl: { IdToken: (ctx, token, client) => (client.clientId === "expired" ? -3600 : 600) },
  findAccount: (ctx, login) => {
    const claims = JSON.parse(readFileSync(people))[login];
    return claims && { accountId: login, claims: () => ({ sub: login, ...claims }) };
  },
});
provider.listen(Number(port), "127.0.0.1");
